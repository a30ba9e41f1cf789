"""whet in other training programs."""
