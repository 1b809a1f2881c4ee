"""What a figure shows is computed first, then drawn by plotly. `plot` draws some by matplotlib."""
