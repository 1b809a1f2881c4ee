"""One question, answered: what is asked (`asked`), and the ways that answer it. No words, no figures."""
