// The panel "KV cache".

import { size } from "./format.js";

/** The size now, in words. */
export function cacheNow({ bytes, full_bytes: full, used_bytes: used }) {
  return `${size(bytes)} of ${size(full)}, ${size(used)} in use by requests`;
}

/** What a resize to `bytes` would do. */
export function cacheWould(cache, bytes) {
  if (bytes === cache.bytes) return "Move the slider to another size.";
  if (bytes < cache.bytes) {
    const goes = `${size(bytes)}: ${size(cache.bytes - bytes)} would go to the driver`;
    if (bytes >= cache.smallest_bytes) return `${goes} at once.`;
    return `${goes}, once the requests on ${size(cache.smallest_bytes - bytes)} of it have ended.`;
  }
  const comes = `${size(bytes)}: ${size(bytes - cache.bytes)} would come from the driver`;
  return bytes <= cache.largest_bytes ? `${comes}.` : `${comes}, which has only ${size(cache.largest_bytes - cache.bytes)} free.`;
}
