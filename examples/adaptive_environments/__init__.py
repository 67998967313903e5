"""Two environments in one run, whose difficulty follows success."""
