"""Options that the runs of these tests share."""

STEPS = 40
OPTIONS = ("train.precision=fp64", f"train.steps={STEPS}", "checkpoint.every=10", "export.at_end=none")
TWO = ("launch.processes=2",)
