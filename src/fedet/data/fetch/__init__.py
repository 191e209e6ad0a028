"""Download data sets, verify them, and write them as parquet files; not used during a run."""

from fedet.data.fetch.datasets import check_name, fetch, verify

__all__ = ["check_name", "fetch", "verify"]
