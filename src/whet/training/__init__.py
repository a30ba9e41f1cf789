"""The training loop: step, optimizers, schedule, guard, metrics, profiler and trackers."""
