"""Two runs side by side: `python tools/compare.py RUN_A RUN_B [key=value ...]`.

What was set otherwise, loss and accuracy curves, top-1 and top-5 with a paired test over the images, the images on
which the two disagree, accuracy by class, speed and memory. A table on the terminal, and in the output folder
`index.html` (one page with everything), `compare.json`, and contact sheets of the disagreements. Runs may still be
going on.

    output=      a folder; left out: comparisons/A--B, with a number where that holds other runs
    images=24    shown of each kind of disagreement
"""

from typing import Annotated

from pydantic import Field

from pycls_fast.config import Section, options_line


class Options(Section):
    """Keys of this tool."""

    run_a: str
    run_b: str
    output: str | None = None
    images: Annotated[int, Field(ge=0)] = 24


def main(options: Options) -> int:
    """Compare and write."""
    # torch takes seconds to import; a mistake on the command line is told before that.
    from pycls_fast.ledger.compare import compare

    return compare(options.run_a, options.run_b, output=options.output, images=options.images)


if __name__ == "__main__":
    options_line(main, Options, words=("run_a", "run_b"))
