"""The JSON Schemas of backbeat's files, generated from the types that read them."""
