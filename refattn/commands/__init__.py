"""The subcommands of `refattn`, one module each, with configure(parser) and run(args) -> exit code."""
