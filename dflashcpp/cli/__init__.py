"""The command line: one thin file a command. Everything here can be done from Python as well."""
