"""whet beside other training programs."""
