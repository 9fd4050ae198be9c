import { useEffect, useState } from "preact/hooks";
import type { AskEvent, AskState } from "../schema";
import { get, Unreachable, withToken } from "../shared/net";
import { advance, begin, type Progress } from "./progress";

const NAMES: AskEvent["event"][] = ["queued", "started", "overview", "turn", "crop_started", "crop_done", "done", "failed", "cancelled"];
const ENDS = ["done", "failed", "cancelled"];
const RETRY_MS = 2000;

/** Follows a question until it ends. A stream that breaks is taken up again, as soon as the server is there again. */
export function useAsk(id: string | undefined, question: string): { progress: Progress | null; problem: string | null } {
  const [held, setHeld] = useState<{ id: string; progress: Progress } | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  useEffect(() => {
    setProblem(null);
    if (!id) return;
    const address = `v1/ask/${encodeURIComponent(id)}`;
    let stream: EventSource | null = null;
    let timer = 0;
    let stopped = false;
    const add = (events: AskEvent[]) =>
      setHeld((held) => ({ id, progress: events.reduce(advance, held?.id === id ? held.progress : begin("")) }));
    const listen = () => {
      stream = new EventSource(withToken(`${address}/events`));
      for (const name of NAMES) {
        stream.addEventListener(name, (message) => {
          add([{ event: name, ...(JSON.parse(message.data) as object) } as AskEvent]);
          setProblem(null);
          if (ENDS.includes(name)) stream?.close();
        });
      }
      stream.onerror = () => {
        stream?.close();
        timer = setTimeout(open, RETRY_MS);
      };
    };
    const open = async () => {
      try {
        const state = (await get(address)) as AskState;
        if (stopped) return;
        add(state.events);
        setProblem(null);
        if (!ENDS.includes(state.state)) listen();
      } catch (error) {
        if (stopped) return;
        setProblem(error instanceof Error ? error.message : String(error));
        if (error instanceof Unreachable) timer = setTimeout(open, RETRY_MS);
      }
    };
    void open();
    return () => {
      stopped = true;
      clearTimeout(timer);
      stream?.close();
    };
  }, [id]);
  const progress = held && held.id === id ? held.progress : null;
  if (progress && !progress.episode.question) return { progress: { ...progress, episode: { ...progress.episode, question } }, problem };
  return { progress, problem };
}
