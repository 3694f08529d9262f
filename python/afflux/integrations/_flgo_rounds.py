"""Rounds of an FLGo server whose steps are made by an `afflux.Server`: one for each step, stored, and gone on from."""

import json
from typing import Any, Literal, get_args

import msgspec
from flgo.algorithm.asyncbase import AsyncServer

from afflux.integrations._core import TrainingRun

#: What FLGo's loggers keep of early stopping.
_EarlyStop = Literal["_es_best_score", "_es_best_round", "_es_patience", "_es_counter"]


class Notes(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint keeps of a run, beside the server."""

    round: int = -1  #: the last one that was logged; -1: there is no checkpoint
    begun: int = 0  #: the last one that had begun, with this learning rate
    time: float = 0.0
    learning_rate: float = 0.0
    early_stop: dict[_EarlyStop, float | None] = {}
    output: dict[str, list[Any] | dict[str, Any]] = {}  #: the logger's, but for FLGo's options


class StoredRounds(AsyncServer):
    """FLGo's asynchronous server as far as it counts, logs and stores rounds."""

    training: TrainingRun
    _resumed: Notes

    def run(self) -> None:
        """Runs until FLGo's exit condition holds; then closes the store, after a last checkpoint."""
        try:
            super().run()
        finally:
            self.training.end()
            self.training.close(self._notes(self.current_round - 1))

    def _end_round(self) -> None:
        """What `run` does after a round; it does so itself for the last one of each moment of FLGo's clock."""
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
        """`Notes` as plain data; `logged` is the last round that was logged."""
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
        """FLGo calls it every `check_interval` rounds, after it has logged the round."""
        self.training.checkpoint(self._notes(self.current_round))

    def _load_checkpoint(self) -> bool:
        """FLGo calls it first in `run`; whether the newest model needs no evaluation."""
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
        for number in range(notes.begun + 1, version + 2):  # after steps that were stored later
            self.global_lr_scheduler(number)
        logger.info(f"Goes on after round {version} at time {clock.current_time:g}")
        return not (notes.round < version and logger.check_if_log(version, self.eval_interval))


def _is_kept(value: object) -> bool:
    """Whether a logger's variable is a list or a dict that JSON can hold."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, list | dict)
