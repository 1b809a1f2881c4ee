"""Tables of 80 columns for the terminal, and the plain data behind some of them."""
