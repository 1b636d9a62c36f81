export function useEffect(act: () => void | (() => void), of?: unknown[]): void;
export function useState<T>(first: T): [T, (next: T) => void];
