"""What models and runs are compared by: the loss of each validation conversation, and statistics. numpy alone."""
