export interface Signal<T> { value: T; peek(): T; }
export function signal<T>(first: T): Signal<T>;
export function effect(act: () => unknown): () => void;
export function batch<T>(act: () => T): T;
