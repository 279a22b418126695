"""Regression on a table, by an estimator that scikit-learn's own tools work with.

    python examples/tabular_regression.py
    trainer-lib report runs

The network stands in a pipeline behind a scaler, and a grid search chooses its width and learning rate. A linear
regression says what there was to gain.
"""

import argparse

from sklearn.datasets import make_friedman1
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from trainer_lib import PartialState, TrainingArguments
from trainer_lib.sklearn import TrainerRegressor


def make_network(features: int, targets: int, width: int = 32) -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, targets))


def main() -> None:
    options = parse_options()
    rows, targets = make_friedman1(n_samples=1000, n_features=8, noise=0.5, random_state=0)
    seen, unseen, known, wanted = train_test_split(rows, targets, random_state=0)

    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=32,
        save_every="1000 steps",
    )
    pipeline = make_pipeline(StandardScaler(), TrainerRegressor(make_network, args))
    grid = {
        "trainerregressor__module_kwargs__width": [8, 64],
        "trainerregressor__args__learning_rate": [3e-3, 3e-2],
    }
    search = GridSearchCV(pipeline, grid, cv=2).fit(seen, known)

    show = PartialState().print  # once, by the main process
    show("width  learning rate  R² in cross-validation")
    for choice, score in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
        width, rate = (choice[name] for name in grid)
        show(f"{width:>5}{rate:>15}{score:>24.3f}")
    linear = LinearRegression().fit(seen, known)
    show(f"\nR² on rows that were kept back: {search.score(unseen, wanted):.3f}", end=" ")
    show(f"(linear regression: {linear.score(unseen, wanted):.3f})")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Choose and train a network for a table.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--num_train_epochs", type=float, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    main()
