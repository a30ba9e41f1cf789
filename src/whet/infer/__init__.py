"""A trained model at work: answers, scores, chat."""
