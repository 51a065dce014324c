"""How much does the default suite notice? Changes of one place, drawn at random from all functions of the source.

    python -m tests.random_mutations --record                which tests execute which line: ten minutes on two cores
    python -m tests.random_mutations --number 400 --seed 7   a sample, at most one change a function: ten minutes
    python -m tests.random_mutations --list FILE             of changes that somebody has written down

`tests.mutations` holds mistakes that somebody thought of; this asks about those that nobody did.

    changes    the source of a function -> every simple change of one place
    written    a list of changes of functions; what lies outside of them can only be tried by `tests.mutations`
    lines      which tests of the default suite execute a line, and how long each takes
    loaded     a changed function takes the place of the one that is loaded
    run        a session of pytest that has collected everything forks for each change, and runs the tests of its line

Changed code does what nobody meant: it may remove or replace any file that its process may. Run it where that does no
harm, and not as root.

Nothing is written into the source. Tests that start a new Python are asked too, but see the source as it is: what
only they would notice is among those that are told.
"""
