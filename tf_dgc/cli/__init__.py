"""The command line, `tf-dgc`."""
