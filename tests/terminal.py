"""Start a command as a terminal's shell does: every stop signal has its default action.

A signal that is ignored stays ignored in the processes that a process starts. `nohup make test` ignores SIGHUP, and a
shell without job control ignores SIGINT and SIGQUIT in what it starts with `&`, which is how `make unit` starts half of
the tests. Tests that send signals begin their command with `TERMINAL`.
"""

TERMINAL = ("env", "--default-signal=HUP,INT,QUIT,TERM")
"""Words before a command. `env` replaces itself by the command, so its pid is that of the command."""
