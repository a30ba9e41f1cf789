"""Tasks: questions with right answers, and what a model makes of them."""
