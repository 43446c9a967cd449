// The line below the panel "Tags": what backups take.

import { size } from "./format.js";

/** `backup` as in the answer of /memory_occupation. */
export function backupText({ bytes, file_bytes: inFiles, capacity_bytes: ready, limit_bytes: limit, ...more }) {
  const { unused_bytes: unused, shared_store: store } = more;
  const spare = unused ? `, ${size(unused)} of it for the next release` : "";
  const parts = [`Backups: ${size(bytes - inFiles)} in host memory (${size(ready)} pinned${spare}, at most ${size(limit)})`];
  if (inFiles) parts.push(`${size(inFiles)} in files`);
  if (store) {
    parts.push(
      `${size(store.held_bytes)} of it in the store ${store.name}, a share of ${size(store.share_bytes)} (processes: ` +
        `${store.processes}; ${size(store.used_bytes)} in use by any, ${size(store.total_bytes)} of memory, at most ` +
        `${size(store.limit_bytes)})`,
    );
  }
  return `${parts.join(", ")}.`;
}
