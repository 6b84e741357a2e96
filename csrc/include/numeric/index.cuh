/* index_t: offsets within one plane. INDEX_64 is defined for planes of 2^31 elements and more.
 * Offsets of whole planes are always 64 bits wide.
 */
#pragma once

#ifdef INDEX_64
using index_t = long long;
#else
using index_t = int;
#endif
