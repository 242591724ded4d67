"""Code in a process of its own, in which nothing has been defined, built or traced before.

Such processes are forked from one that has imported the package and done nothing: importing
TensorFlow for each would take longer than what they are there for.
"""

import multiprocessing
import os
import sys
import tempfile

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["keras_sgmcmc"])


def run(code, *arguments, path=()):
    """Run Python code with command-line arguments; returns what it printed.

    path: folders that it can import modules from.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        arguments = [str(argument) for argument in arguments]
        process = _context.Process(
            target=_child, args=(code, arguments, [str(p) for p in path], output.name)
        )
        process.start()
        process.join()
        printed = output.read()
    assert process.exitcode == 0, printed[-3000:]
    return printed


def _child(code, arguments, path, output):
    sys.argv[1:], sys.path[:0] = arguments, path
    # Errors too, those that end the process in C++ among them.
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    exec(compile(code, "<fresh process>", "exec"), {"__name__": "__main__"})
