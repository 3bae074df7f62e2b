"""Problems for the policy: the `Task` record and the readers of files that hold them."""
from slca.data.task import Task
from slca.data.toucan import DataError, load_tasks

__all__ = ["DataError", "Task", "load_tasks"]
