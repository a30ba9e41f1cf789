"""The models of runs: built for training, loaded for inference, found by reference, registered."""
