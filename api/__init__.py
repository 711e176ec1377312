"""Every face for people and programs: the command line, REST, and `forebay up`."""
