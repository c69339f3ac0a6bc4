"""Tables, pictures and explanations of a program, for people to read."""
