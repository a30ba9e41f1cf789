"""Checks before training (`whet check`) and a view of the data as the model sees it (`whet inspect`)."""
