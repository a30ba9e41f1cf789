"""The optimizer, the schedule, the step and the loop around it."""
