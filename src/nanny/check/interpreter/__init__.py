"""Walks a program without running it: `Interpreter(project, options).walk(module)` gives what was seen, for the rules."""
