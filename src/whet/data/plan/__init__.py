"""Which documents make which row of which step: mixture, packing and the plan of a run."""
