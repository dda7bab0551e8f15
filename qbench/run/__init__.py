"""Running cells: cell.py is the worker, local.py runs it in processes on this box, ray.py on a cluster."""
