import { useEffect, useState } from "preact/hooks";
import type { Episode } from "../schema";
import { loadEpisode } from "../shared/data";
import type { Row } from "./rows";

export type Loaded = { episode: Episode } | { problem: string } | "loading";

export function useEpisode(row: Row): Loaded {
  const [loaded, setLoaded] = useState<{ ref: string; state: Loaded }>({ ref: "", state: "loading" });
  useEffect(() => {
    let stale = false;
    const settle = (state: Loaded) => stale || setLoaded({ ref: row.ref, state });
    if (row.chunk) loadEpisode(row.chunk, row.id).then((episode) => settle({ episode }), (error) => settle({ problem: String(error.message) }));
    else settle({ problem: "This episode was left out of the file to keep it small; only what the list says of it is here." });
    return () => void (stale = true);
  }, [row.ref, row.chunk]);
  return loaded.ref === row.ref ? loaded.state : "loading";
}
