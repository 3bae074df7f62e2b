"""Problems for the policy: the `Task` record and the readers of files that hold them."""
from slca.data.rows import DataError
from slca.data.task import Task
from slca.data.toucan import iter_tasks, load_tasks

__all__ = ["DataError", "Task", "iter_tasks", "load_tasks"]
