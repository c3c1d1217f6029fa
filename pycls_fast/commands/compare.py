"""Two runs side by side: `pycls-fast compare RUN_A RUN_B [key=value ...]`.

Shows different settings, loss and accuracy curves, top-1 and top-5 with a paired test over the images, the images on
which the two disagree, accuracy by class, speed and memory. Prints a table, and writes into the output folder
`index.html` (one page with everything) and `compare.json`. The runs need not be finished.

    output=      a folder; default: one in comparisons/
    images=24    images shown per kind of disagreement
"""

from typing import Annotated, NoReturn

from pydantic import Field

from pycls_fast.config import Section, command_line


class Options(Section):
    """Keys of this tool."""

    run_a: str
    run_b: str
    output: str | None = None
    images: Annotated[int, Field(ge=0)] = 24


def main(options: Options) -> int:
    """Compare and write."""
    # torch takes seconds to import; mistakes on the command line are reported before that.
    from pycls_fast.ledger.compare import compare_runs

    return compare_runs(options.run_a, options.run_b, output=options.output, images=options.images)


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, default=None, options=Options, about=__doc__, words=("run_a", "run_b"))
