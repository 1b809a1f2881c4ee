"""One module a figure: what it shows, computed into a small frozen structure, and that drawn by plotly. `plot` draws
some by matplotlib."""
