"""HTML: the report and the layouts' page as single files, and the what-if page that is served."""
