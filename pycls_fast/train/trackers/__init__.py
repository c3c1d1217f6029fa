"""Where a run's numbers go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow."""

from pycls_fast.train.trackers.board import Board, check_installed, open_board

__all__ = ["Board", "check_installed", "open_board"]
