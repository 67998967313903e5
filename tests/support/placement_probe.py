"""Place a run on a Ray that believes it has four GPUs, print who got which, then ask for more than there is."""

import json
import os
import sys

sys.path.insert(0, os.getcwd())

import ray

from slime.arguments import parse_args
from slime.ray import cluster
from slime.ray.driver.placement_group import PlacementError, create_placement_groups


def main() -> None:
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=200 * 2**20, logging_level="ERROR")
    args = parse_args()
    groups = create_placement_groups(args)
    here = cluster.current()
    placed = {name: (bundles, gpus) for name, (_, bundles, gpus) in groups.items()}
    print(json.dumps({"device": args.device_type, "trainer": here.share_of_slot(0.4), "placed": placed}))
    args.rollout_num_gpus, args.placement_timeout = 3, 2.0
    try:
        create_placement_groups(args)
    except PlacementError as e:
        print(json.dumps({"refused": str(e)}))
    here.shutdown()


main()
