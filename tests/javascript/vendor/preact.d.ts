export function h(...words: any[]): any;
export function render(shown: any, place: Element): void;
