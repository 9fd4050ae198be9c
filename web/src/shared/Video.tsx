import type { VNode } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { withToken } from "./net";

export type Seek = (time: number) => void;

/** A player, the time (seconds) it is at, and how to move it. Without an address there is only the time. */
export function useVideo(address: string | null): { player: VNode | null; at: number | null; seek: Seek } {
  const video = useRef<HTMLVideoElement>(null);
  const [at, setAt] = useState<number | null>(null);
  const [broken, setBroken] = useState(false);
  useEffect(() => {
    setAt(null);
    setBroken(false);
  }, [address]);
  const seek = useCallback((time: number) => {
    setAt(time);
    if (video.current) video.current.currentTime = time;
  }, []);
  const web = address !== null && /^https?:$/.test(new URL(address, document.baseURI).protocol);
  const player = web ? (
    <div class="player">
      <video
        ref={video}
        src={withToken(address)}
        controls
        muted
        playsInline
        preload="metadata"
        aria-label="The video"
        onTimeUpdate={(event) => setAt(event.currentTarget.currentTime)}
        onError={() => setBroken(true)}
      />
      {broken && <p class="note">This browser cannot play the video. That does not keep the model from watching it.</p>}
    </div>
  ) : null;
  return { player, at, seek };
}
