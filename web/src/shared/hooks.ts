import { useEffect, useRef, useState } from "preact/hooks";

export type State = Record<string, string>;
export type Change = (change: Record<string, string | null>, entry?: "new" | "same") => void;

const read = (): State => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** The page's state in the address's hash. "new" makes an entry of the history, "same" changes the current one. */
export function useHash(): [State, Change] {
  const [state, setState] = useState(read);
  useEffect(() => {
    const follow = () => setState(read());
    addEventListener("popstate", follow);
    addEventListener("hashchange", follow);
    return () => {
      removeEventListener("popstate", follow);
      removeEventListener("hashchange", follow);
    };
  }, []);
  const change: Change = (values, entry = "new") => {
    const merged = Object.entries({ ...read(), ...values }).filter(([, value]) => value !== null && value !== "");
    const hash = `#${new URLSearchParams(merged as [string, string][])}`;
    if (hash === (location.hash || "#")) return;
    history[entry === "new" ? "pushState" : "replaceState"](null, "", hash);
    setState(read());
  };
  return [state, change];
}

export function useMedia(query: string): boolean {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const follow = () => setMatches(list.matches);
    list.addEventListener("change", follow);
    return () => list.removeEventListener("change", follow);
  }, [query]);
  return matches;
}

const escapes: (() => void)[] = [];
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented) escapes.at(-1)?.();
});

/** What Escape does while a component is there; the innermost one hears it. */
export function useEscape(close: (() => void) | null): void {
  const latest = useRef(close);
  latest.current = close;
  const active = close !== null;
  useEffect(() => {
    if (!active) return;
    const handler = () => latest.current?.();
    escapes.push(handler);
    return () => void escapes.splice(escapes.indexOf(handler), 1);
  }, [active]);
}

/** Arrow keys move the focus between the buttons of a group, which is one stop of the Tab key. */
export function roving(event: KeyboardEvent): void {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (step === undefined) return;
  const buttons = [...(event.currentTarget as HTMLElement).querySelectorAll<HTMLButtonElement>("button")];
  const next = buttons[buttons.indexOf(document.activeElement as HTMLButtonElement) + step];
  if (next) next.focus();
  event.preventDefault();
}
