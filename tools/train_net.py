"""Train a network: `python tools/train_net.py --config-name vit_digits [key=value ...]`."""

from pycls_fast.config import NoOptions, RunConfig, command_line


def main(config: RunConfig, options: NoOptions) -> int:
    """Train as configured."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train import train

    return train(config)


if __name__ == "__main__":
    command_line(main, trains=True)
