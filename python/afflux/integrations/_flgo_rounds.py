"""Rounds of an FLGo server whose steps an `afflux.Server` makes: one round for each step, stored and resumed."""

import json
from contextlib import suppress
from typing import Any, Literal, get_args

import msgspec
from flgo.algorithm.asyncbase import AsyncServer

from afflux.integrations._core import TrainingRun

#: The variables of early stopping in FLGo's loggers.
_EarlyStop = Literal["_es_best_score", "_es_best_round", "_es_patience", "_es_counter"]


class Notes(msgspec.Struct, forbid_unknown_fields=True):
    """The data of a run that a checkpoint stores in addition to the server."""

    round: int = -1  #: the last round that was logged; -1: there is no checkpoint
    begun: int = 0  #: the last round that had begun, with this learning rate
    time: float = 0.0
    learning_rate: float = 0.0
    early_stop: dict[_EarlyStop, float | None] = {}
    output: dict[str, list[Any] | dict[str, Any]] = {}  #: the logger's output, without FLGo's options


class StoredRounds(AsyncServer):
    """The part of FLGo's asynchronous server that counts, logs and stores rounds."""

    training: TrainingRun
    _resumed: Notes

    def run(self) -> None:
        """Run until FLGo's exit condition holds; then close the store, after a last checkpoint."""
        try:
            super().run()
        finally:
            self.training.end()
            self.training.close(self._notes(self.current_round - 1))

    def _end_round(self) -> None:
        """End a round as FLGo's `run` does. `run` itself ends the last round of each moment of FLGo's clock."""
        logger = self.gv.logger
        logger.info(f"--------------Round {self.current_round}--------------")
        if logger.check_if_log(self.current_round, self.eval_interval):
            logger.log_once()
            if self.option.get("save_optimal", False):
                logger.trace_optimal_state()
        if logger.early_stop():
            self.register_exit_condition(lambda server: True)
        if self.current_round % self.option.get("check_interval", 1) == 0:
            self._save_checkpoint()
        self.current_round += 1
        self.global_lr_scheduler(self.current_round)

    def _notes(self, logged: int) -> dict[str, Any]:
        """Return `Notes` as plain data; `logged` is the last round that was logged."""
        logger = self.gv.logger
        stop = {name: getattr(logger, name) for name in get_args(_EarlyStop)}
        return {
            "round": logged,
            "begun": self.current_round,
            "time": float(self.gv.clock.current_time),
            "learning_rate": float(self.learning_rate),
            "early_stop": {name: None if value is None else float(value) for name, value in stop.items()},
            "output": {name: value for name, value in logger.output.items() if name != "option" and _is_kept(value)},
        }

    def _save_checkpoint(self) -> None:
        """Save a checkpoint. FLGo calls this method every `check_interval` rounds, after it has logged the round."""
        self.training.checkpoint(self._notes(self.current_round))

    def _load_checkpoint(self) -> bool:
        """Load the last checkpoint; return whether the newest model needs no evaluation. Called first in `run`."""
        notes, logger, clock, version = self._resumed, self.gv.logger, self.gv.clock, self.training.server.version
        if notes.round < 0:
            return False
        logger.output.update(notes.output)
        for name, value in notes.early_stop.items():
            setattr(logger, name, value)
        clock.set_time(max(notes.time, clock.current_time))
        self.learning_rate = notes.learning_rate
        for client in self.clients:
            client.set_learning_rate(self.learning_rate)
        for number in range(notes.begun + 1, version + 2):  # some steps may have been stored after the notes
            self.global_lr_scheduler(number)
        logger.info(f"Continues after round {version} at time {clock.current_time:g}")
        return not (notes.round < version and logger.check_if_log(version, self.eval_interval))


def _is_kept(value: object) -> bool:
    """Return whether a logger's variable is a list or a dict that JSON can represent."""
    with suppress(TypeError, ValueError):
        json.dumps(value)
        return isinstance(value, list | dict)
    return False
