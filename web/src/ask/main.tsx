import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { AskItem, VideoInfo } from "../schema";
import { EpisodeView } from "../shared/EpisodeView";
import { useHash } from "../shared/hooks";
import { get, remove } from "../shared/net";
import type { Heat } from "../shared/Text";
import { useVideo } from "../shared/Video";
import "../shared/base.css";
import "../shared/episode.css";
import "./ask.css";
import { Form } from "./Form";
import { inWords } from "./progress";
import { useAsk } from "./useAsk";

/** Where the answer is below the form. */
const STACKED = "(max-width: 860px)";

function App() {
  const [state, change] = useHash();
  const [videos, setVideos] = useState<VideoInfo[]>([]);
  const [history, setHistory] = useState<AskItem[]>([]);
  const [problem, setProblem] = useState<string | null>(null);
  const [heat, setHeat] = useState<Heat>("off");
  const say = (error: Error) => setProblem(error.message);
  useEffect(() => {
    get("v1/videos").then((items) => setVideos(items as VideoInfo[]), say);
  }, []);

  const main = useRef<HTMLElement>(null);
  const chosen = useRef(state.ask);
  useEffect(() => {
    if (state.ask && state.ask !== chosen.current && matchMedia(STACKED).matches) main.current?.scrollIntoView();
    chosen.current = state.ask;
  }, [state.ask]);
  const asked = history.find(({ id }) => id === state.ask);
  const { progress, problem: broken } = useAsk(state.ask, asked?.question ?? "");
  useEffect(() => void get("v1/asks").then((items) => setHistory(items as AskItem[]), say), [progress?.state]);
  const video = asked?.video ?? state.video ?? videos[0]?.id ?? "";
  const shown = videos.find(({ id }) => id === video);
  const { player, at, seek } = useVideo(progress?.episode.video_url ?? shown?.url ?? null);
  const going = progress && !broken && (progress.state === "queued" || progress.state === "running");
  return (
    <div class="page">
      <header class="top-of-page"><h1>Ask a long video</h1></header>
      {problem && <p class="errors" role="alert">{problem} <button type="button" onClick={() => setProblem(null)}>Dismiss</button></p>}
      <div class="ask-layout">
        <section class="ask-a" aria-label="Ask">
          <Form
            videos={videos}
            video={video}
            onVideo={(id) => change({ video: id, ask: null })}
            onUploaded={(added) => {
              setVideos((held) => [added, ...held.filter(({ id }) => id !== added.id)]);
              change({ video: added.id, ask: null });
            }}
            onAsked={(id) => change({ ask: id, video })}
          />
        </section>
        <main ref={main} class={state.ask ? "asked" : ""}>
          {player}
          <div class={`status-line ${progress?.state ?? ""}`}>
            <p role="status" aria-live="polite">{broken ?? (progress ? inWords(progress) : state.ask ? "Loading…" : shown ? "Ask something about this video." : "Choose a video, or upload one.")}</p>
            {going && state.ask && <button type="button" onClick={() => void remove(`v1/ask/${encodeURIComponent(state.ask)}`).catch(say)}>Cancel</button>}
          </div>
          {progress && (progress.episode.overview.length > 0 || progress.state === "done") && <EpisodeView key={state.ask} episode={progress.episode} heat={heat} onHeat={setHeat} at={at} seek={seek} />}
        </main>
        {history.length > 0 && (
          <nav class="asked-before" aria-label="Questions asked before">
            <h2>Asked before</h2>
            <ul class="history">
              {history.map((item) => (
                <li key={item.id}>
                  <button type="button" aria-current={item.id === state.ask ? "true" : undefined} onClick={() => change({ ask: item.id })}>
                    <span class="ellipsis">{item.question}</span>
                    <span class="muted ellipsis">{item.state === "done" ? (item.answer ?? "no answer") : item.state}</span>
                  </button>
                </li>
              ))}
            </ul>
          </nav>
        )}
      </div>
    </div>
  );
}

const app = document.getElementById("app");
if (app) render(<App />, app);
