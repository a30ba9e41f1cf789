"""What the runs of these tests have in common."""

STEPS = 40
OPTIONS = ("train.precision=fp64", f"train.steps={STEPS}", "checkpoint.every=10", "export.at_end=none")
TWO = ("launch.processes=2",)
