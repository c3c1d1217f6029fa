"""Train a network: `python tools/train_net.py --config-name vit_digits [key=value ...]`."""

from pycls_fast.config import command_line
from pycls_fast.train import train

if __name__ == "__main__":
    command_line(lambda config, options: train(config))
