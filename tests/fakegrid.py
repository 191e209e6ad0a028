"""Flower in one process: real messages, records and apps, taken apart and put together as on a network, and faults at will."""

import random
import types

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1


def over_the_wire(content):
    """Records as they arrive elsewhere."""
    parts = {key: thing.deflate() for key, thing in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, parts)


class FakeGrid(Grid):
    """Nodes 1000, 1001, ... that answer when they are pulled, in any order, or fail as `faults` says.

    A fault is a function of (node, message, pulls so far) that returns None to behave, a Message in place of the app's own,
    "silent" to never answer, or "later" to not answer yet.
    """

    def __init__(self, app, node_configs, run_config, seed=0):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
        self.app, self.run_config = app, run_config
        self.contexts = {}
        for config in node_configs:
            self.join(config)
        self.dead, self.order = set(), random.Random(seed)
        self.waiting, self.pulls = {}, {}
        self.faults = {}
        self.asked = []
        self.tamper = lambda node, reply: reply

    def join(self, node_config):
        node = 1000 + len(self.contexts)
        self.contexts[node] = Context(1, node, node_config, RecordDict(), self.run_config)
        return node

    def set_run(self, run): ...

    @property
    def run(self):
        return types.SimpleNamespace(run_id=1)

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return self.order.sample(sorted(set(self.contexts) - self.dead), len(self.contexts) - len(self.dead))

    def push_messages(self, messages):
        ids = []
        for message in messages:
            name = f"m{len(self.asked)}"
            message.metadata.__dict__["_message_id"] = name
            self.asked.append((message.metadata.dst_node_id, message.metadata.message_type, message.metadata.group_id))
            content = over_the_wire(message.content)
            arrived = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
            arrived.metadata.__dict__["_message_id"] = name
            self.waiting[name], self.pulls[name] = arrived, 0
            ids.append(name)
        return ids

    def pull_messages(self, message_ids):
        ready = []
        for name in self.order.sample(list(message_ids), len(message_ids)):
            reply = self._reply(name) if name in self.waiting else None
            if reply is not None:
                del self.waiting[name]
                ready.append(reply)
        return ready

    def _reply(self, name):
        message = self.waiting[name]
        node = message.metadata.dst_node_id
        self.pulls[name] += 1
        if self.order.random() < 0.5 and self.pulls[name] < 4:
            return None  # any order
        if node in self.dead:
            return error(message, 5, "Node Unavailable")
        fault = self.faults.get(node, lambda *_: None)(node, message, self.pulls[name])
        if fault in ("silent", "later"):
            return None
        if fault is not None:
            return fault
        try:
            reply = self.app(message, self.contexts[node])
        except Exception as raised:
            return error(message, 2, repr(raised))
        return self.tamper(node, Message(over_the_wire(reply.content), reply_to=message))

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


def error(message, code, reason):
    return Message(Error(code, reason), reply_to=message)


class Clock:
    """Time that passes only while someone sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
