import logging
import sys

logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("vllm").setLevel(logging.INFO)
logging.getLogger("vllm").propagate = False
