import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

interface Props<T> {
  items: T[];
  /** What stays the same when the items change. */
  keyOf: (item: T) => string;
  /** Pixels; all rows are as high. */
  height: number;
  label: string;
  render: (item: T) => ComponentChildren;
  onOpen: (item: T) => void;
  /** The key of the item that is active at first. */
  first: string | null;
  /** What the items were chosen by: when it changes, the list is at its top again. */
  choice: string;
}

/** A list box that holds only the rows that are in view: thousands of items cost what dozens do. */
export function List<T>({ items, keyOf, height, label, render, onOpen, first, choice }: Props<T>) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [active, setActive] = useState(() => Math.max(0, items.findIndex((item) => keyOf(item) === first)));
  const current = Math.min(active, items.length - 1);

  const look = () => {
    if (box.current) setView({ top: box.current.scrollTop, height: box.current.clientHeight });
  };
  const show = (index: number, place: "near" | "middle") => {
    const element = box.current;
    if (!element) return;
    const [top, bottom] = [index * height, (index + 1) * height];
    if (place === "middle") element.scrollTop = top - element.clientHeight / 2;
    else if (top < element.scrollTop) element.scrollTop = top;
    else if (bottom > element.scrollTop + element.clientHeight) element.scrollTop = bottom - element.clientHeight;
    look();
  };
  useLayoutEffect(() => {
    if (first !== null && active > 0) {
      show(active, "middle");
      box.current?.focus({ preventScroll: true });
    }
    look();
    addEventListener("resize", look);
    return () => removeEventListener("resize", look);
  }, []);
  useEffect(look, [items.length, height]);
  const chosen = useRef(choice);
  useEffect(() => {
    if (chosen.current === choice) return;
    chosen.current = choice;
    setActive(0);
    show(0, "near");
  }, [choice]);

  const onKeyDown = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(view.height / height) - 1);
    const last = items.length - 1;
    const moves: Record<string, number> = { ArrowDown: current + 1, ArrowUp: current - 1, PageDown: current + page, PageUp: current - page, Home: 0, End: last };
    if (event.key in moves) {
      const next = Math.max(0, Math.min(last, moves[event.key]));
      setActive(next);
      show(next, "near");
    } else if ((event.key === "Enter" || event.key === " ") && items[current]) onOpen(items[current]);
    else return;
    event.preventDefault();
  };

  const from = Math.max(0, Math.floor(view.top / height) - 6);
  const shown = items.slice(from, Math.ceil((view.top + view.height) / height) + 6);
  return (
    <div ref={box} class="list" role="listbox" tabIndex={0} aria-label={label} onScroll={look} onKeyDown={onKeyDown} aria-activedescendant={items.length ? `row-${current}` : undefined}>
      <div style={{ height: `${items.length * height}px`, position: "relative" }} role="presentation">
        {shown.map((item, offset) => {
          const index = from + offset;
          return (
            <div
              key={keyOf(item)}
              id={`row-${index}`}
              class="row"
              role="option"
              aria-selected={index === current}
              aria-posinset={index + 1}
              aria-setsize={items.length}
              style={{ top: `${index * height}px`, height: `${height}px` }}
              onClick={() => {
                setActive(index);
                onOpen(item);
              }}
            >
              {render(item)}
            </div>
          );
        })}
      </div>
    </div>
  );
}
