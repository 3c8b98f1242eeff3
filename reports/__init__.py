"""Pages for people, made from what tuning runs and benchmarks have left: `python -m reports`.

The folder of this package is also where a checkout keeps published results: reports/<device>/<shape>-<dtype>/.
"""
