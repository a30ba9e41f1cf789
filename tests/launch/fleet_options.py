"""What the runs of these tests have in common."""

STEPS = 80
OPTIONS = ("train.precision=fp64", f"train.steps={STEPS}", "checkpoint.every=20", "export.at_end=none")
TWO = ("launch.processes=2",)
